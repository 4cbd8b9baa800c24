"""Tools for whoever works on the library; none of them needs a GPU."""
