"""What `make lab` asks of the Jupyter server."""

from typing import Any


def keep_metadata(model: dict[str, Any], **_: Any) -> None:
    """Before a notebook is saved: leave out the name of this machine's kernel and its version of Python.

    JupyterLab writes both as soon as a notebook is opened, so that a clone that was only read would have changed, and
    `git pull` would refuse the next edition. A pre-save hook of jupyter_server's ContentsManager.
    """
    if model["type"] == "notebook":
        model["content"]["metadata"] |= {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
