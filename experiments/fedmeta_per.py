"""FedMeta-Per and the systems of its comparison (Nguyen, Cao: Tables 3 and 4). The study is studies/fedmeta_per.yaml."""

from fedjax_meta.front import program

app = program("fedmeta_per")

if __name__ == "__main__":
    app()
