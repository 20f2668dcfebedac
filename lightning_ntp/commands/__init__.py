"""The subcommands of ``lightning-ntp`` besides LightningCLI's: each module has a ``main`` that takes arguments."""
