"""Files that experiments write: refused before anything is done, rather than when all of it is."""

from pathlib import Path

from relaygr.errors import InvalidInput

__all__ = ["checked_file", "checked_folder"]


def checked_file(field: str, path: Path) -> None:
    """Raises InvalidInput naming the field where no file of this name can be written."""
    if path.is_dir():
        raise InvalidInput(field, f"cannot be written: {path} is a folder")
    if not path.parent.is_dir():
        raise InvalidInput(field, f"cannot be written: {path.parent} is no folder")


def checked_folder(field: str, path: Path) -> None:
    """Make the folder; raises InvalidInput naming the field where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, f"cannot be written: {path} cannot be made a folder ({error.strerror})") from error
