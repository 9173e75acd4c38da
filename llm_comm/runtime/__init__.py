"""One group of ranks: how they meet, map each other's memory, and notice that one of them has failed."""
