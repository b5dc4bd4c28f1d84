"""The built-in tasks, one module for each: items of a clean and a corrupt prompt, drawn from a seed."""
