"""ExLlamaV3's generator under random histories of jobs (exllamav3_steps.py): as
it is, with each of its bugs alone, and with none. exllamav3.md has the
results."""

import exllamav3_steps
import page
import torch
from exllamav3_repairs import REPAIRS, repaired
from histories import judged

HISTORIES = 120
#: The setups in which bugs are shown alone, and how many histories are tried.
ALONE = [("banned", "Banned", 120), ("waiting", "Plain", 120),
         ("again", "StatesAlone", 600), ("linked", "Ngram", 120),
         ("taken", "Plain", 400), ("full", "SmallRequeued", 120)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    setups, lines = exllamav3_steps.SETUPS, []
    for name, setup in setups.items():
        lines += page.say(name, judged(exllamav3_steps, setup, HISTORIES))
    for bug, name, histories in ALONE:
        with repaired([name for name in REPAIRS if name != bug]):
            lines += page.say(f"{name}, all repaired but {bug}",
                              judged(exllamav3_steps, setups[name], histories))
    for name, setup in setups.items():
        with repaired(REPAIRS):
            lines += page.say(f"{name}, all repaired",
                              judged(exllamav3_steps, setup, HISTORIES))
    page.compare(lines, "exllamav3.md")
