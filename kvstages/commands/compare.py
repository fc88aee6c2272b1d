import click


@click.command("compare")
def command():
    pass
