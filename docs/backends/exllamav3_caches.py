"""ExLlamaV3's generator under random histories of jobs (exllamav3_steps.py): as
it is, with each of its bugs alone, and with none. exllamav3.md has the
results."""

import exllamav3_steps
import page
import torch
from exllamav3_repairs import REPAIRS
from histories import results

HISTORIES = 120
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("banned", "Banned", 120), ("waiting", "Plain", 120),
         ("again", "StatesAlone", 600), ("linked", "Ngram", 120),
         ("taken", "Plain", 400), ("full", "SmallRequeued", 120)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    page.compare(results(exllamav3_steps, REPAIRS, ALONE, HISTORIES),
                 "exllamav3.md")
