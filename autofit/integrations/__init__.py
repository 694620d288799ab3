"""Callbacks for training loops of other libraries; each module imports its library."""
