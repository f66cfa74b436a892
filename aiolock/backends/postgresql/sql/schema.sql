CREATE TABLE IF NOT EXISTS {table} (
  key text COLLATE "C" NOT NULL PRIMARY KEY,
  value bytea NOT NULL,
  version text COLLATE "C" NOT NULL,
  expires timestamptz
) WITH (fillfactor = 50);
COMMENT ON TABLE {table} IS 'aiolock data format 1'
