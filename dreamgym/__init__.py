"""DreamGym: agents learn by reinforcement learning inside an experience model (arXiv 2511.03773).

README.md has a map of this package.
"""

import logging

# On import, bitsandbytes hints at a package for 4-bit kernels on a CPU. Nobody here can use that hint, and it
# would head the output of every command.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
