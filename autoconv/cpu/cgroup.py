"""The control groups of this process, by which the system limits its time and its memory.

Sources: "Control Group v2", "CFS Bandwidth Control" and "Memory Resource Controller", in the documentation of the Linux
kernel. A group's limits are also its descendants'.
"""

from __future__ import annotations

from pathlib import Path

PROCESS = Path("/proc/self")
# Files of a group: its limit, what it uses, and the key of what the system could take back of that.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory() -> tuple[int | None, int | None]:
    """The least limit of this process's groups, and the least of what is left of one, in bytes; None without any."""
    limits, left = [], []
    for version, group in folders("memory"):
        limit, used, key = _MEMORY[version]
        most, now = read(group / limit), read(group / used)
        if most.isdecimal() and now.isdecimal():  # not "max", which is none
            lines = (line.split() for line in read(group / "memory.stat").splitlines())
            idle = next((int(line[1]) for line in lines if line[:1] == [key] and line[1:2] and line[1].isdecimal()), 0)
            limits.append(int(most))
            left.append(max(0, int(most) - int(now) + idle))
    return min(limits, default=None), min(left, default=None)


def read(file: Path) -> str:
    """A small file of the system's, without the end of its last line; empty where there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return ""


def folders(controller: str) -> list[tuple[int, Path]]:
    """This process's groups that a controller may limit, ancestors included: the version and the folder of each."""
    paths = {}  # of a version's group, below where the hierarchy is mounted
    for line in read(PROCESS / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    found = []
    for line in read(PROCESS / "mountinfo").splitlines():
        mounted, _, kind = line.partition(" - ")
        fields, words = mounted.split(), kind.split()
        if len(fields) < 5 or len(words) < 3 or words[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if words[0] == "cgroup2" else 1
        if version not in paths or (version == 1 and controller not in words[2].split(",")):
            continue
        root, top = fields[3], Path(fields[4])
        below = paths[version].removeprefix("" if root == "/" else root).strip("/")
        group = top / below
        if ".." in group.parts or not group.is_dir():  # of another name space: what is mounted here is the group itself
            group = top
        found += [(version, folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return found
