"""Uses Ray: the cluster's nodes, their versions, and the actors that launch trials on them."""
