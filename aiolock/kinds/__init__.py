"""Lock kinds beyond the plain mutex, and what is built on registers: latch and barrier."""
