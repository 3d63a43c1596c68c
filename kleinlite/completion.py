"""Completion for shells, written from the command line's own parser: commands, options, choices; files elsewhere."""

import argparse
from collections.abc import Iterator

__all__ = ["SHELLS", "write_completion"]

SHELLS = ("bash", "zsh", "fish")

BASH = """\
_kleinlite() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}}
  local words=
  if [ "$COMP_CWORD" -eq 1 ]; then words='{commands}'
  else case $command in
{cases}
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  case $current in -*) ;; *) [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -f -- "$current")) ;; esac
}}
complete -o filenames -F _kleinlite kleinlite"""


def write_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script for one of `SHELLS`, to be evaluated when a shell starts."""
    commands = dict(find_commands(parser))
    if shell == "fish":
        return "\n".join(write_fish(commands))
    cases = "\n".join(f"    {name}) words='{' '.join(find_words(sub))}' ;;" for name, sub in commands.items())
    script = BASH.format(commands=" ".join(commands), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def find_commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def find_words(parser: argparse.ArgumentParser) -> list[str]:
    """Long options, and what a place without one may hold."""
    words = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return words + [word for action in parser._actions if not action.option_strings for word in action.choices or ()]


def write_fish(commands: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, sub in commands.items():
        about = (sub.description or "").replace("\\", "\\\\").replace("'", "\\'")
        yield f"complete -c kleinlite -f -n __fish_use_subcommand -a {name} -d '{about}'"
        for word in find_words(sub):
            option = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            yield f"complete -c kleinlite -n '__fish_seen_subcommand_from {name}' {option}"
