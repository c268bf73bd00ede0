"""Executes the notebooks given, each in a kernel of its own, and counts them."""

import pathlib
import sys
import time
import traceback

import nbclient
import nbformat


def passes(path: pathlib.Path) -> bool:
    begin = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    try:
        nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    except nbclient.exceptions.CellExecutionError:
        traceback.print_exc()
        return False
    print(f"{path}: {time.monotonic() - begin:.0f} s", flush=True)
    return True


def main() -> int:
    begin = time.monotonic()
    results = [passes(pathlib.Path(name)) for name in sys.argv[1:]]
    passed, failed = results.count(True), results.count(False)
    seconds = time.monotonic() - begin
    print(f"{passed} passed, {failed} failed in {seconds:.0f} s")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
