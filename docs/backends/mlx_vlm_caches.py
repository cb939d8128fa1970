"""mlx-vlm's batches and prefix caches under random histories of requests
(mlx_vlm_steps.py): as they are, with each of their bugs alone, and with none; and
whole models in batches (mlx_vlm_models.py). mlx_vlm.md has the results."""

import mlx_vlm_models
import mlx_vlm_steps
import page
from histories import results
from mlx_vlm_repairs import REPAIRS

HISTORIES = 20
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("window", "Window", 100), ("cancel", "StatesImages", 40),
         ("wide", "Wide", 20), ("reset", "Full", 100),
         ("held", "Stream", 40), ("bound", "StreamBound", 40),
         ("stop", "Chat", 40), ("image", "ChatImages", 300),
         ("length", "ChatList", 20)]


def models():
    """Says the results of each whole model."""
    lines = []
    for name in mlx_vlm_models.NAMES:
        model = mlx_vlm_models.made(name)
        lines += page.say(name, mlx_vlm_models.judged(model))
    return lines


if __name__ == "__main__":
    page.compare(results(mlx_vlm_steps, REPAIRS, ALONE, HISTORIES) + models(),
                 "mlx_vlm.md")
