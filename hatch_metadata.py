"""What the package's page shows: the project's addresses, and a README without dead links.

The repository is the one that the checkout was cloned from, if it is public. Its README links to files beside
it, which a package index does not have: there they become addresses in the repository, or names of files
where no repository is known.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PUBLIC_HOSTS = ("github.com", "gitlab.com", "codeberg.org", "bitbucket.org")
_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?://|#)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in `project.urls` and `project.readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with `project`'s table."""
        root = Path(self.root)
        built = root / "PKG-INFO"  # of an unpacked source distribution, where there is no repository any more
        address = packaged_repository(built.read_text()) if built.exists() else public_repository(root)
        metadata["urls"] = urls(address)
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_addresses((root / "README.md").read_text(), address),
        }


def public_repository(root: Path) -> str | None:
    """The web address of the public repository that a checkout was cloned from; None if there is none."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return web_address(remote)


def web_address(remote: str) -> str | None:
    """The web address of a git remote at a public host, without user and password; None for any other."""
    form = r"(?:(?:https|ssh|git)://)?(?:[^@/]*@)?([^@/:]+)(?::[0-9]+/|[:/])([\w.-]+(?:/[\w.-]+)+)"
    found = re.fullmatch(form, remote.removesuffix("/").removesuffix(".git"))
    return f"https://{found[1]}/{found[2]}" if found and found[1] in PUBLIC_HOSTS else None


def packaged_repository(package_information: str) -> str | None:
    """The repository that a source distribution's metadata names."""
    found = re.search(r"^Project-URL: Repository, (\S+)$", package_information, re.MULTILINE)
    return found[1] if found else None


def urls(address: str | None) -> dict[str, str]:
    """The project's addresses in a repository."""
    if address is None:
        return {}
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/HEAD/docs/README.md",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def with_addresses(text: str, address: str | None) -> str:
    """Markdown whose links to files are addresses in a repository, or without one the files' names."""

    def replaced(link: re.Match[str]) -> str:
        picture, label, target = link.groups()
        if address is not None:
            return f"{picture}[{label}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"
        return f"({label})" if picture else f"{label} (`{target.partition('#')[0]}`)"

    return _LINK.sub(replaced, text)
