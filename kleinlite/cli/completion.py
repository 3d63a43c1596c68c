"""`kleinlite completion bash`: what a shell needs to complete commands, options and files."""

import argparse

import shtab


def run(args: argparse.Namespace) -> None:
    from . import make_parser

    parser = make_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar and ("FILE" in action.metavar or action.metavar in ("REF", "FOLDER", "NAME", "OUT")):
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
