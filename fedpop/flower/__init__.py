"""The same runs across machines, on Flower: the only package that imports flwr, and only where it must.

letters, records   what goes to and fro, and its form as Flower's records
site, memory       what a site does with a letter, and what it keeps in a file
client             the ClientApp
post, elsewhere    a Grid as a post office with deadlines; the members of a run at other sites
server             the ServerApp
federation, folder, certificates, processes, commands
                   the settings file, and the commands ``fedpop server`` and ``fedpop site``
"""
