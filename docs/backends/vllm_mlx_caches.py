"""vLLM-MLX's scheduler and prefix caches under random histories of requests
(vllm_mlx_steps.py): as they are, with each of their bugs alone, and with none.
vllm_mlx.md has the results."""

import page
import vllm_mlx_steps
from histories import judged
from vllm_mlx_repairs import REPAIRS, repaired

HISTORIES = 20
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("padding", "States", 20), ("last", "Entries", 20),
         ("last", "Blocks", 20), ("common", "Window", 40),
         ("disk", "Disk", 80), ("files", "Restarts", 40),
         ("hash", "Blocks", 40), ("window", "BlocksWindow", 40)]


if __name__ == "__main__":
    setups, lines = vllm_mlx_steps.SETUPS, []
    for name, setup in setups.items():
        lines += page.say(name, judged(vllm_mlx_steps, setup, HISTORIES))
    for bug, name, histories in ALONE:
        with repaired([name for name in REPAIRS if name != bug]):
            lines += page.say(f"{name}, all repaired but {bug}",
                              judged(vllm_mlx_steps, setups[name], histories))
    for name, setup in setups.items():
        with repaired(REPAIRS):
            lines += page.say(f"{name}, all repaired",
                              judged(vllm_mlx_steps, setup, HISTORIES))
    page.compare(lines, "vllm_mlx.md")
