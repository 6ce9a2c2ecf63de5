"""What every stage of a pipeline was begun with, so that one folder never mixes stages of different settings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rlkv import __version__
from rlkv.utils.atomic import atomic_path

RECORDS = "stages.json"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


class StageRecords:
    """``stages.json`` of a results folder: by stage its command, digests of the config files in it, the version.

    A record is written before its stage starts, so whatever a stage leaves has one.

    Args:
        root: where the commands run; YAML and JSON files that a command names outside of ``folder`` are config files.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self._file = folder / RECORDS
        self._begun: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._now: dict[str, Any] = {}

    def check(self, name: str, command: list[str], has_results: bool) -> None:
        """Compare a stage with its record.

        Raises:
            ValueError: if it was begun with something else, or ``has_results`` of which nobody knows what made them.
        """
        self._now[name] = self._facts(command)
        if name in self._begun:
            self._compare(name, self._begun[name], self._now[name])
        elif has_results:
            raise ValueError(
                f"stage '{name}' left results in {self.folder}, but {RECORDS} does not say with which settings: "
                "run it again with FRESH=1 (--fresh)"
            )

    def begin(self, name: str, command: list[str]) -> None:
        """Keep what a checked stage starts with now.

        Raises:
            ValueError: if a config file was changed since the check, which earlier stages did not see.
        """
        self._compare(name, self._now[name], self._facts(command))
        self._begun[name] = self._now[name]
        with atomic_path(self._file) as partial:
            partial.write_text(json.dumps(self._begun, indent=1) + "\n")

    def _facts(self, command: list[str]) -> dict[str, Any]:
        files = [word for word in command if word.endswith(CONFIG_SUFFIXES)]
        outside = [word for word in files if not (self.root / word).resolve().is_relative_to(self.folder.resolve())]
        digests = {word: self._digest(self.root / word) for word in outside}
        return {"command": command, "configs": digests, "version": __version__}

    @staticmethod
    def _digest(file: Path) -> str | None:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None

    def _compare(self, name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
        if before["command"] != now["command"]:
            old, new = (
                " ".join(word for word in one["command"] if word not in other["command"]) or "no other words"
                for one, other in ((before, now), (now, before))
            )
            what = f"another command ({old}; now: {new})"
        elif before["configs"] != now["configs"]:
            changed = [file for file, digest in now["configs"].items() if before["configs"].get(file) != digest]
            what = f"another content of {', '.join(changed)}"
        elif before["version"] != now["version"]:
            what = f"version {before['version']} of this package, which is now {now['version']}"
        else:
            return
        raise ValueError(f"stage '{name}' in {self.folder} was begun with {what}: run it again with FRESH=1 (--fresh)")
