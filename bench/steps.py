"""What the scripts for GPU machines share: programs with a time limit, facts of the machine, results as JSON."""
import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

KILL_AFTER_S = 5  # between the polite signal and the other one
INFO_LIMIT_S = 60


def fail(message):
    """Bad input: one line on stderr, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Options whose errors are one line, as the program's are."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)

    def error(self, message):
        fail(f"{message} (--help lists what is allowed)")


def number_of(kind, least):
    """A type for options: a number of this kind, not below `least`."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"'{text}' is not allowed; it must be a number from {least}")
        return value

    return parse


@dataclass
class Step:
    """How a program ended. `returncode` is None if it ran past its limit or did not start."""
    returncode: int | None
    timed_out: bool
    seconds: float
    output: str  # stdout and stderr together

    def last_line(self):
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def reason(self):
        """Why it failed, in one line."""
        if self.timed_out:
            return f"ran past {self.seconds:.0f} s" + (f"; last line: {self.last_line()}" if self.last_line() else "")
        if self.returncode is not None and self.returncode < 0:
            return f"{signal.Signals(-self.returncode).name}; {self.last_line()}"
        return f"exit code {self.returncode}: {self.last_line()}" if self.returncode is not None else self.last_line()


def end_group(process):
    """Ends what the step started, its children included: they are a process group of their own."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            return
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            pass


def run_step(command, limit_s, environment=None):
    """Runs a command to its end or its limit. Its output goes through a file: a pipe could be held open by a child."""
    begin = time.monotonic()
    timed_out = False
    with tempfile.TemporaryFile() as file:
        try:
            process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file,
                                       stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, **(environment or {})})
        except OSError as error:
            return Step(None, False, 0.0, f"{command[0]}: {error.strerror}")
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_group(process)
        file.seek(0)
        output = file.read().decode(errors="replace")
    return Step(None if timed_out else process.returncode, timed_out, time.monotonic() - begin, output)


def find_program(folder, name):
    """The program in a build folder, an installed one, or a folder that holds nothing but programs; None if missing."""
    for place in (folder, folder / "tests", folder / "bin"):
        if os.access(place / name, os.X_OK) and (place / name).is_file():
            return place / name
    return None


def first_gpus(count):
    """Environment in which only the first of the visible GPUs are seen."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:count])}


def query_gpus(*fields):
    """One list of texts for each GPU that the driver knows; empty without nvidia-smi."""
    step = run_step(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], INFO_LIMIT_S)
    if step.returncode != 0:
        return []
    return [[value.strip() for value in line.split(",")] for line in step.output.splitlines() if line.strip()]


def facts(moewave, commit):
    """When, where and what: date, GPUs that the program can use, driver, commit (the given one, else the build's)."""
    info = {}
    if moewave is not None:
        step = run_step([moewave, "info", "--json", "-"], INFO_LIMIT_S)
        try:
            info = json.loads(step.output)
        except ValueError:
            print(f"moewave info: {step.reason()}", file=sys.stderr)
    build = info.get("build", {})
    drivers = sorted({gpu[0] for gpu in query_gpus("driver_version")})
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpus": [device["name"] for device in info.get("devices", []) if device.get("usable")],
        "driver": drivers[0] if len(drivers) == 1 else drivers or None,
        "commit": commit or build.get("commit") or None,
        "version": info.get("version"),
        "cuda": build.get("cuda") or None,
    }


def heading(known):
    """The facts in one line."""
    gpus = known["gpus"]
    names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no usable GPU"
    return (f"{names}, driver {known['driver'] or 'unknown'}, moewave {known['version'] or 'unknown'}, "
            f"commit {known['commit'] or 'unknown'}, {known['date']}")


def check_output(path):
    """Refuses a destination before any work rather than after it."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        fail(f"--output {path} cannot be written; it must be a file in a folder that exists")


def write_json(path, content):
    """Whole or not at all, so that a run which is cut off leaves its last complete state."""
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)
