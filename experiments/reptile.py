"""Compares Per-FedAvg-Reptile (Xia and Cui) with Per-FedAvg and FedAvg with one update; the study is studies/reptile.yaml."""

from fedjax_meta.front import program

app = program("reptile")

if __name__ == "__main__":
    app()
