"""FedPAC (Xu, Tong and Huang, ICLR 2023) and its rivals in personalised federated learning; the study is studies/fedpac.yaml."""

from fedjax_meta.front import program

app = program("fedpac")

if __name__ == "__main__":
    app()
