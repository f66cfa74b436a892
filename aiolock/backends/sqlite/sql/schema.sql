CREATE TABLE aiolock (
    key TEXT NOT NULL PRIMARY KEY,
    version TEXT NOT NULL,
    value BLOB NOT NULL,
    expires REAL -- seconds of the wall clock from which on the row may be purged; NULL for never
)
