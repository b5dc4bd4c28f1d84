"""How many heads or edges keep a behaviour: rankings, inclusion curves, their protocol and statistics."""
