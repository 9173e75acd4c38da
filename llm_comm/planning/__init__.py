"""Which kernel serves a message: tuning tables, and what they say for a size. No torch and no core here."""
