"""The same runs across machines, on Flower: the only package that imports flwr, and only where it must.

requests, records  requests, replies and refusals; their form as Flower's records
site, site_state   what a site does with a request, and the file that stores its units' states
client             the ClientApp
transport          requests and replies over a Grid, with deadlines
remote             the members of a run at other sites
aggregation, site_records
                   messages made into a total; what the server knows of each site
deployment, server a run across sites, and the ServerApp
server_folder, site_folder, certificates, processes, commands
                   the settings files, and the commands ``fedpop server`` and ``fedpop site``
ledger, allowed    what left a site, and what it answers
outcome, status, present
                   estimates and warnings at the end; how a run stands, and what it waits for
logs, watch, pages, metrics, trackers
                   logs of commands, the live page, numbers for Prometheus, MLflow and TensorBoard
"""
