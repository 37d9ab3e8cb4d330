"""The same runs across machines, on Flower: the only package that imports flwr, and only where it must.

requests, records  requests, replies and refusals; their form as Flower's records
site, site_state   what a site does with a request, and the file that stores its units' states
table_form         what its table looked like when it was enrolled
transport          requests and replies over a Grid, with deadlines
node               a site's process: Flower's fleet protocol in front of the site
door, link         the server's process: what admitted sites reach, and the Grid of the run behind it
admission          who may take part
client, stock      the ClientApp, and its signature, for sites that run Flower's stock node
remote             the members of a run at other sites
aggregation, site_records
                   messages made into a total; what the server knows of each site
deployment, server a run across sites, and the process that it is in
server_folder, server_settings, site_folder, certificates, processes, commands, offline
                   the settings files, and the commands ``fedpop server`` and ``fedpop site``
ledger, allowed    what left a site, and what it answers
outcome, status, present
                   estimates and warnings at the end; how a run stands, and what it waits for
logs, watch, pages, metrics, trackers
                   logs of commands, the live page, numbers for Prometheus, MLflow and TensorBoard
"""
