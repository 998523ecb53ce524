# How the shell tests report: a case starts with `begin NAME`, notes what is amiss with `wrong REASON`, and ends with `end`.
# A script that sources this file ends with `exit "$failed"`.
# shellcheck shell=bash disable=SC2034

failed=0 case_name='' reason=''

begin() { case_name=$1 reason=''; }
wrong() { [ -n "$reason" ] || reason=$1; }  # keeps the first one
end() {
    if [ -z "$reason" ]; then echo "ok - $case_name"; return; fi
    echo "not ok - $case_name: $reason"
    failed=1
}
skip() { echo "skip - $1: $2"; }
