"""Ray: the nodes, their versions, and the actors that launch trials on them."""
