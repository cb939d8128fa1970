"""Runs jobs of GitHub and GitLab as their runners would, on this machine."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

import yaml

EXPRESSION = re.compile(r"\$\{\{\s*([\w.]+)\s*\}\}")
GITHUB_BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")


class Caches:
    """The stored entries of a CI's cache: copies of a path, by their keys."""

    def __init__(self, folder):
        self._folder = folder
        self.keys = []  # The oldest first.

    def save(self, key, path):
        """Stores an entry, if it is new: an entry cannot be changed."""
        if path.exists() and key not in self.keys:
            copy(path, self._folder / key)
            self.keys.append(key)

    def restore(self, keys, path):
        """Restores the newest entry of the first key that is the start of one."""
        for wanted in keys:
            for key in reversed(self.keys):
                if key.startswith(wanted):
                    copy(self._folder / key, path)
                    return


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def visible_files(path):
    """Returns the files that actions/upload-artifact takes: none that is hidden, and
    none below a hidden folder in `path`."""
    found = []
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [pathlib.Path(folder, name) for name in files if not name.startswith(".")]
    return found


@dataclasses.dataclass
class GitHub:
    """A job of GitHub Actions in the folder `work`, where the sources are. `actions`
    has the folder of each action of ours, by the name under which it is used."""

    work: pathlib.Path
    path: str
    caches: Caches
    run_id: str
    actions: dict[str, pathlib.Path]
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The exit code of the first step that failed.
    code: int = 0
    log: str = ""
    artifacts: dict[str, list[pathlib.Path]] = dataclasses.field(default_factory=dict)
    #: The steps that ran, as "run" or the name of an action.
    ran: list[str] = dataclasses.field(default_factory=list)

    def run(self, steps):
        """Runs the steps of a job."""
        for step in steps:
            self._step(step)
        return self

    def _step(self, step):
        wanted = {
            "always()": True, "failure()": self.code != 0, "success()": self.code == 0
        }[step.get("if", "success()")]
        if not wanted:
            return
        self.ran.append(step.get("uses", "run"))
        if "run" in step:
            self._shell(step)
        else:
            given = {name: self._value(text) for name, text in step.get("with", {}).items()}
            self._use(step["uses"], given)

    def _value(self, text):
        """Returns a text with the values of its expressions."""
        known = {"github.job": "check", "github.run_id": self.run_id}
        known["github.run_attempt"] = "1"
        known |= {f"inputs.{name}": value for name, value in self.inputs.items()}
        return EXPRESSION.sub(lambda found: known[found[1]], str(text))

    def _shell(self, step):
        env = dict(os.environ, GITHUB_ACTIONS="true", PATH=self.path)
        env["GITHUB_STEP_SUMMARY"] = str(self.work / "summary.md")
        env |= {name: self._value(text) for name, text in step.get("env", {}).items()}
        done = subprocess.run(
            [*GITHUB_BASH, self._value(step["run"])], cwd=self.work, env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )
        self.log += done.stdout
        self.code = self.code or done.returncode

    def _use(self, name, given):
        action, _, _version = name.partition("@")
        if action in self.actions:
            self._compose(self.actions[action], given)
        elif action == "actions/checkout":
            pass  # The sources are there.
        elif action == "actions/cache/restore":
            keys = [given["key"], *given.get("restore-keys", "").split()]
            self.caches.restore(keys, self.work / given["path"])
        elif action == "actions/cache/save":
            self.caches.save(given["key"], self.work / given["path"])
        elif action == "actions/upload-artifact":
            files = visible_files(self.work / given["path"])
            self.artifacts.setdefault(given["name"], []).extend(files)
        else:
            raise ValueError(f"this runner has no {name}")

    def _compose(self, folder, given):
        """Runs the steps of a composite action."""
        action = yaml.safe_load((folder / "action.yml").read_text(encoding="utf-8"))
        unknown = given.keys() - action["inputs"].keys()
        if unknown or action["runs"]["using"] != "composite":
            raise ValueError(f"{folder}: no input {unknown}, or not composite")
        outer = self.inputs
        self.inputs = {name: i.get("default", "") for name, i in action["inputs"].items()}
        self.inputs |= given
        for step in action["runs"]["steps"]:
            if "run" in step and step["shell"] != "bash":
                raise ValueError(f"this runner has no shell {step['shell']}")
        self.run(action["runs"]["steps"])
        self.inputs = outer


def run_gitlab(job, variables, work, path, cached):
    """Runs a job that extends the job of a template of GitLab, with variables. The
    folder `cached` is the CI's cache. Returns the exit code, the log, and the
    artifacts."""
    if cached.exists():
        copy(cached, work)
    env = dict(os.environ, CI="true", PATH=path, **job["variables"])
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(job["script"])],
        cwd=work, env=env | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    state = "on_failure" if done.returncode else "on_success"
    if job["cache"]["when"] in ("always", state):
        for name in job["cache"]["paths"]:
            if (work / name).exists():
                copy(work / name, cached / name)
    kept = []
    if job["artifacts"]["when"] in ("always", state):
        paths = [*job["artifacts"]["paths"], *job["artifacts"]["reports"].values()]
        kept = [work / name for name in paths if (work / name).exists()]
    return done.returncode, done.stdout, kept
