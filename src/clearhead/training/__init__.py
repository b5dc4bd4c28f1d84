"""The only training loop, what it trains, and what measures the result."""
