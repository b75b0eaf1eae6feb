"""Speed of what has a bound, on real parts. Never installed."""
