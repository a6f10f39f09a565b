"""Models and patterns as people bring them, trained for three steps against eager: `make models`."""
