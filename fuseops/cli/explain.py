"""`fuseops explain PATH_OR_MODULE`."""

import argparse

from fuseops.explain import Explanation, plans

from .target import add_target, load, writing
from .terminal import file_option, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    file_option(parser, "--html", "write a page with drawings to FILE")


def run(args: argparse.Namespace) -> int:
    target = load(args.target)
    explanation = Explanation(plans(target.model, *target.args, **target.side))
    if args.html is not None:
        with writing(args.html):
            page = explanation.to_html(f"Fusion plan of {target.name}")
            args.html.write_text(page, encoding="utf-8")
    if args.json:
        html = None if args.html is None else str(args.html)
        print_json("explain", target=target.name, **explanation.to_json(), html=html)
        return 0
    print(explanation)
    if args.html is not None:
        print(f"\nwrote {args.html}")
    return 0
