"""Writes a study as one HTML file, which needs no other file and no network.

``content`` reads the store, ``figures`` makes Plotly's figures as plain data, and ``page`` fills
the template. Only ``page`` needs Plotly, whose script becomes a part of the file.
"""
