# Sources every subject; `up` and `down` begin with it.
# shellcheck shell=bash

KIND_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export REPOSITORY
REPOSITORY=$(cd "$KIND_DIR/../.." && pwd)
export PATH=$PATH:/usr/sbin:/sbin

for file in lib/{settings,progress,cache,packages} engine/{engine,traces} node-image/{parts,rootfs,images,assemble,image} \
	cluster/{tools,prometheus,create,network,crio,images,gpus,chart}; do
	# shellcheck source=/dev/null # each is checked by itself
	source "$KIND_DIR/$file.sh"
done
unset file
