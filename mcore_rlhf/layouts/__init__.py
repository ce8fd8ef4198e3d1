"""How models are cut over ranks: each relation written once, as data that reads both ways."""
