"""Small models trained from start to end on a CPU or a GPU: `python -m examples.text --help`."""
