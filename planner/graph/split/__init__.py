"""Row-wise runs of a joint graph, computed in pieces: found (`runs.py`, by the rules of `rules.py`) and put
into the graph (`pieces.py`)."""
