"""vLLM-MLX's scheduler and prefix caches under random histories of requests
(vllm_mlx_steps.py): as they are, with each of their bugs alone, and with none.
vllm_mlx.md has the results."""

import page
import vllm_mlx_steps
from histories import results
from vllm_mlx_repairs import REPAIRS

HISTORIES = 20
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("padding", "States", 20), ("last", "Entries", 20),
         ("last", "Blocks", 20), ("common", "Window", 40),
         ("disk", "Disk", 80), ("files", "Restarts", 40),
         ("hash", "Blocks", 40), ("window", "BlocksWindow", 40)]


if __name__ == "__main__":
    page.compare(results(vllm_mlx_steps, REPAIRS, ALONE, HISTORIES),
                 "vllm_mlx.md")
