"""One module per verb of the command line, named after it (`train lorsa` is `train_lorsa`), each with two functions.

`plan(config)` returns the rows that `--dry-run` prints and changes nothing; `run(config)` does the work through the
library's public functions and prints what came out. The library itself prints nothing.
"""
