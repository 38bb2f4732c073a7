"""The command `autoconv`."""

try:
    from autoconv.cli.main import main
except KeyboardInterrupt:  # that takes a while, and `main` cannot say yet what became of it
    raise SystemExit(130) from None

__all__ = ["main"]
