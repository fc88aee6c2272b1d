import click


@click.command("crate")
def command():
    pass
