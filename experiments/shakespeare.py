"""Predicts the next characters of Shakespeare's speakers, by federated systems and centrally: studies/shakespeare.yaml."""

from fedjax_meta.front import program

app = program("shakespeare")

if __name__ == "__main__":
    app()
