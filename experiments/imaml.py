"""MAML, FOMAML, Reptile and iMAML in federated learning (Nguyen et al.): studies/imaml.yaml. `round_costs imaml` times them."""

from fedjax_meta.front import program

app = program("imaml")

if __name__ == "__main__":
    app()
