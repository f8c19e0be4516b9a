# Parts that take minutes to build are kept, each in a folder named after a hash of its inputs.
# shellcheck shell=bash

# digest INPUT... hashes files and folders by their content, anything else as the string it is.
digest() {
	local input
	for input in "$@"; do
		if [[ -d $input ]]; then
			(cd "$input" && find . -type f -print0 | sort -z | xargs -0r sha256sum)
		elif [[ -f $input ]]; then
			sha256sum <"$input"
		else
			printf '%s\n' "$input"
		fi
	done | sha256sum | cut -c 1-16
}

# part NAME INPUT... prints the folder of the part that is built from the inputs.
part() {
	printf '%s/%s-%s\n' "$TRANCHE_CACHE" "$1" "$(digest "${@:2}")"
}

# build PART TITLE COMMAND... builds a missing part; the command gets an empty folder as its last argument.
# A part gets its name only when it is complete. Parts that were not used for two weeks are removed.
build() {
	local part=$1 title=$2
	shift 2
	mkdir -p "$TRANCHE_CACHE"
	if [[ -d $part ]]; then
		kept "$title"
	else
		step "$title" under_lock "$part.lock" fill "$part" "$@"
	fi
	touch "$part"
}

fill() {
	local part=$1
	shift
	if [[ -d $part ]]; then return; fi # another process did while this one waited for the lock
	find "$TRANCHE_CACHE" -mindepth 1 -maxdepth 1 -type d -mtime +14 -exec rm -rf {} +
	rm -rf "$part.partial"
	mkdir "$part.partial"
	"$@" "$part.partial"
	mv "$part.partial" "$part"
}

# alone starts the script again under a lock, so that two clones do not build or change the same engine at once.
alone() {
	[[ -z ${TRANCHE_KIND_ALONE-} ]] || return 0
	mkdir -p "$TRANCHE_CACHE"
	export TRANCHE_KIND_ALONE=yes
	exec flock --close "$TRANCHE_CACHE/lock" "$0" "$@"
}

# locked COMMAND... runs a command or function under the same lock, unless the script has it already.
locked() {
	if [[ ${TRANCHE_KIND_ALONE-} ]]; then
		"$@"
		return
	fi
	mkdir -p "$TRANCHE_CACHE"
	under_lock "$TRANCHE_CACHE/lock" "$@"
}

# under_lock FILE COMMAND... runs a command or function under the lock of a file. Nothing that the command leaves running
# keeps it.
under_lock() {
	local lock=$1
	shift
	(
		flock 9
		"$@" 9>&-
	) 9>"$lock"
}
