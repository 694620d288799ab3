"""Runs a plan on a device and says truthfully what happened."""

if __name__ == "worker":
    raise ModuleNotFoundError("import it as autofit.worker")
