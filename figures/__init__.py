"""Pictures of results. They are drawn into files: what backend a notebook or a desktop has set in
the environment need not exist here, and must be replaced before matplotlib is first imported."""

import os

os.environ["MPLBACKEND"] = "Agg"
