#!/usr/bin/env bash
#
# Download a training text into data/ and check its size and SHA-256.
#
# Usage: scripts/get_data.sh [tinyshakespeare]
#        scripts/get_data.sh --help
#
# Environment:
#   DATA_DIR   folder to save into (default: data/ in the repository root)
#   MIRRORS    space-separated URLs to use instead of the built-in ones
#   EXPECT_SHA256, EXPECT_BYTES
#              replace the expected hash and size (meant for the tests)
#
# Exit status:
#   0  the file is there and correct
#   2  wrong usage
#   3  no network, or no mirror delivered the whole file
#   4  a mirror delivered the wrong content
#   5  a needed tool is missing (curl or wget; sha256sum or shasum)
#   6  cannot write: folder not writable, locked, or another file in the way
#   130, 143  interrupted; the same command resumes the download

set -uo pipefail

# One data set a line: name, SHA-256, bytes, mirrors. Saved as NAME.txt.
DATASETS='
tinyshakespeare 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed 1115394 https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/input.txt
'
TRIES=3             # per mirror, waiting 1 and 2 seconds in between
CONNECT_SECONDS=3   # short, so that a machine without network is told soon;
                    # wget gets 1, as it waits anew for each of ~4 addresses
STALL_SECONDS=10    # gives up when nothing arrives; a slow link is no error
LOCK_SECONDS=20     # how long to wait for another run to finish

note() { printf 'get_data.sh: %s\n' "$*" >&2; }
die() { local code=$1; shift; note "$*"; exit "$code"; }
have() { command -v "$1" >/dev/null 2>&1; }
size() { if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi; }
sha() { $sha_tool <"$1" | cut -d ' ' -f 1; }
correct() { [ "$(size "$1")" = "$bytes" ] && [ "$(sha "$1")" = "$sha256" ]; }

# Exits if the target exists: happily if it is right; if not, it may be the
# user's own work, so it is left alone.
check_target() {
    [ -e "$target" ] || [ -L "$target" ] || return 0
    [ -f "$target" ] || die 6 "$target is not a regular file; move it away and run this again."
    correct "$target" && { echo "$target is already there and correct."; exit 0; }
    die 6 "$target has $(size "$target") bytes and SHA-256 $(sha "$target"), expected $bytes bytes and $sha256; move it away and run this again."
}

# mkdir either makes the folder or fails, so only one run at a time gets it.
# A lock left by a killed run is never broken: its downloader may still write.
take_lock() {
    local err waited=0
    until err=$(LC_ALL=C mkdir "$lock" 2>&1); do
        [[ $err == *"File exists"* ]] || die 6 "Cannot write in $dir (${err##*: }); fix that or set DATA_DIR to another folder."
        ((waited)) || note "waiting for the run that holds $lock"
        ((waited++ < LOCK_SECONDS)) || die 6 "Another run still holds $lock; wait for it or, if there is none, remove that folder."
        sleep 1
    done
    locked=1
}

# shellcheck disable=SC2317 # called by the traps
clean_up() {
    if [ -n "$child" ]; then kill "$child"; wait "$child"; fi 2>/dev/null
    [ -z "$locked" ] && return
    [ -s "$part" ] || rm -f "$part"
    rm -rf "$lock"
}

# shellcheck disable=SC2317 # called by the traps
interrupted() {
    trap '' INT TERM HUP
    clean_up; child='' locked=''
    die "$1" "Interrupted with $(size "$part") of $bytes bytes in $part; run the same command again to resume."
}

# One request that appends to the .part. In the background, because bash runs
# a trap during "wait" at once but during a foreground command only after it.
fetch() {
    local get
    case $downloader in
    curl) get=(curl -sSfL -C - --connect-timeout "$CONNECT_SECONDS"
        --speed-limit 1 --speed-time "$STALL_SECONDS" -o "$part" "$1") ;;
    wget) get=(wget -nv -c -t 1 --dns-timeout="$CONNECT_SECONDS"
        --connect-timeout=1 --read-timeout="$STALL_SECONDS" -O "$part" "$1") ;;
    esac
    LC_ALL=C "${get[@]}" >"$log" 2>&1 &
    child=$!; wait "$child"; local rc=$?; child=''
    return "$rc"
}

# Brings the .part to its full size from one mirror, or sets $reason. Worth
# another try: bytes came and then stopped, or the server said "not now".
download() {
    local try before rc status
    resumed=''
    for ((try = 1; try <= TRIES; try++)); do
        before=$(size "$part")
        if ((before > bytes)); then rm -f "$part"; before=0; fi
        if ((before > 0)); then resumed=1; fi
        ((before == bytes)) && return 0
        note "downloading $1${resumed:+ from byte $before on}"
        fetch "$1"; rc=$?
        ((rc == 0)) && { answered=1; return 0; }
        reason=$(tail -n 1 "$log"); reason=${reason#failed: }; reason=${reason:-the connection closed early}
        [[ $(<"$log") =~ (ERROR|error:)\ ([0-9]{3}) ]] && status=${BASH_REMATCH[2]} || status=none
        case $downloader-$rc-$status in
        curl-23-*|wget-3-*) die 6 "Cannot write $part, perhaps because the disk is full; free some space or set DATA_DIR to another folder." ;;
        curl-33-*|*-416) rm -f "$part"; answered=1; continue ;; # cannot resume: afresh
        *-408|*-429|*-5??) answered=1 ;;
        *-[1-4]??) answered=1; return 1 ;;
        curl-52-*|curl-56-*) ;; # connected, but closed without a byte
        *) (($(size "$part") > before)) || return 1; answered=1 ;;
        esac
        ((try == TRIES)) || { note "$reason; trying again in $try s"; sleep "$try"; }
    done
    return 1
}

# Moves a correct .part into place and exits; anything else it throws away.
finish_if_correct() {
    if correct "$part"; then
        mv -n "$part" "$target" || die 6 "Cannot rename $part to $target; check the permissions of $dir."
        [ -e "$part" ] && check_target # someone else made the target meanwhile
        echo "$target is complete and correct ($bytes bytes)."
        exit 0
    fi
    reason="$(size "$part") bytes with SHA-256 $(sha "$part")"
    rm -f "$part"
}

case ${1-} in -h|--help) sed -n '3,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
name=${1-tinyshakespeare} sha256=''
while read -r row sha256 bytes urls; do
    [ "$row" = "$name" ] && [ -n "$row" ] && break
done <<<"$DATASETS"
(($# > 1)) || [ -z "$sha256" ] && die 2 "Unknown arguments '$*'; usage: get_data.sh [tinyshakespeare] (see --help)."
sha256=${EXPECT_SHA256:-$sha256} bytes=${EXPECT_BYTES:-$bytes}
read -ra mirrors <<<"${MIRRORS:-$urls}"

if have sha256sum; then sha_tool=sha256sum
elif have shasum; then sha_tool='shasum -a 256'
else die 5 "Neither sha256sum nor shasum was found; install one of them (coreutils, or Perl)."; fi

dir=${DATA_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/data}
target=$dir/$name.txt part=$target.part lock=$target.lock log=$lock/log
child='' locked='' answered='' wrong='' reason=''
check_target

if have curl; then downloader=curl
elif have wget; then downloader=wget
else die 5 "Neither curl nor wget was found; install one of them."; fi

mkdir -p "$dir" 2>/dev/null || die 6 "Cannot create the folder $dir; make it writable or set DATA_DIR to another one."
trap clean_up EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP
take_lock
check_target # the run waited for may have finished the job

for url in "${mirrors[@]}"; do
    # Perhaps only what was resumed is bad, so then once more from byte 0.
    for afresh in '' 1; do
        download "$url" || break
        finish_if_correct
        if [ -z "$resumed" ] || [ -n "$afresh" ]; then wrong=$reason; break; fi
        note "the resumed file is wrong ($reason); downloading afresh"
    done
    note "$url failed: $reason"
done
if [ -n "$wrong" ]; then
    die 4 "Wrong content was downloaded and thrown away: found $wrong, expected $bytes bytes with SHA-256 $sha256; set MIRRORS to a good URL."
elif [ -n "$answered" ]; then
    die 3 "No mirror delivered the whole file ($(size "$part") of $bytes bytes so far, last error: $reason); try again later to resume, or set MIRRORS to another URL."
fi
die 3 "No network: no mirror could be reached (last error: $reason); check the connection or proxy, or copy the file to $target yourself."
