"""The functions that run the commands; `gcnzc.cli.options` names them."""
