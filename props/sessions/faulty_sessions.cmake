# Sessions with a bug each: reference/sessions.cc with a piece of code replaced.
# Sets faulty_sessions_sources, which is one source. props/sessions/faulty_sessions_test.cc finds them.

set(sessions_source ${PROJECT_SOURCE_DIR}/reference/sessions.cc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sessions_source})
file(READ ${sessions_source} sessions_healthy)
set(faulty_sessions_included "")
set(faulty_sessions_listed "")

function(kvtwin_faulty_sessions name piece replacement)
  string(REPLACE "${piece}" "${replacement}" faulty "${sessions_healthy}")
  if(faulty STREQUAL sessions_healthy)
    message(FATAL_ERROR "The fault ${name} has no place in ${sessions_source}")
  endif()
  string(REPLACE "namespace kvtwin::reference" "namespace kvtwin::${name}" faulty
         "${faulty}")
  set(source ${PROJECT_BINARY_DIR}/faulty_sessions/${name}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "${faulty}" @ONLY)
  set(faulty_sessions_included
      "${faulty_sessions_included}#include \"${source}\"\n" PARENT_SCOPE)
  set(faulty_sessions_listed
      "${faulty_sessions_listed}      {\"${name}\", ${name}::MakeSessions},\n" PARENT_SCOPE)
endfunction()

kvtwin_faulty_sessions(leaves_the_tail_of_a_stop_string
  "if (!cache_->Remove(choice.slot, reused, kOpenEnd).ok()) {"
  "if (choice.source != choice.slot &&
        !cache_->Remove(choice.slot, reused, kOpenEnd).ok()) {")
kvtwin_faulty_sessions(leaves_out_the_media
  "if (planned.input.multimodal != 0) multimodal.push_back(i);" "")
kvtwin_faulty_sessions(reuses_one_token_too_many
  "std::min(prefix, Size(asked.prompt) - 1)" "std::min(prefix + 1, Size(asked.prompt) - 1)")
kvtwin_faulty_sessions(copies_one_token_too_few
  "choice.slot, choice.prefix)" "choice.slot, choice.prefix - 1)")
kvtwin_faulty_sessions(evicts_a_running_slot
  "if (!IsFree(At(slots_, i))) continue;\n      if (oldest" "if (oldest")
kvtwin_faulty_sessions(a_shift_cuts_a_kept_token
  "const int keep = asked.options.keep;" "const int keep = std::max(asked.options.keep - 1, 0);")
kvtwin_faulty_sessions(reuses_what_a_shift_moved
  "place.reusable = std::min(place.reusable, keep);" "place.reusable = place.reusable + 0;")
kvtwin_faulty_sessions(a_failed_shift_forgets_the_rest
  "asked.queue.insert(asked.queue.begin(), rest.begin(), rest.end());" "")
kvtwin_faulty_sessions(a_shift_leaves_a_gap_in_a_window
  "if (cache_->Remove(slot, keep, end).ok() && CanResume(slot, Size(rest))) {"
  "if (cache_->Remove(slot, keep, end).ok()) {")
kvtwin_faulty_sessions(keeps_a_stop_string
  "if (stays < Size(place.record)) place.record.resize(AsSize(stays));" "")
kvtwin_faulty_sessions(keeps_the_token_after_the_end
  "if (EndsUnknown(place)) place.record.pop_back();" "")
kvtwin_faulty_sessions(resumes_without_a_window
  "return can.ok() && *can;" "return can.ok();")
kvtwin_faulty_sessions(divides_a_group "if (end > room) break;" "if (taken >= room) break;")
kvtwin_faulty_sessions(resumes_within_a_group
  "return cut ? cut->first : resumed;" "return resumed;")
kvtwin_faulty_sessions(keeps_half_a_group
  "if (const auto cut = CutGroup(asked.prompt, keep)) keep = cut->first;" "")
kvtwin_faulty_sessions(forgets_who_came_last
  "next_ = next >= 0 ? next : (next_ + 1) % spec().slots;" "next_ = 0;")
kvtwin_faulty_sessions(answers_beyond_the_limit "asked.outputs < asked.most" "true")
kvtwin_faulty_sessions(overlooks_the_last_slot
  "for (int i = 0; i < spec().slots; ++i) {
      if (own &&" "for (int i = 0; i < std::max(spec().slots - 1, 1); ++i) {
      if (own &&")

kvtwin_faulty_sessions(shifts_without_room
  "if (!plan.empty() && room < FirstAgain(place, asked)) return {};" "")
kvtwin_faulty_sessions(forgets_what_it_adopted
  "place.reusable = Size(place.record);" "place.reusable = 0;")
kvtwin_faulty_sessions(believes_a_copy_that_was_refused
  "if (!copied.ok() || !CanResume(choice.slot, reused)) reused = 0;"
  "if (copied.ok() && !CanResume(choice.slot, reused)) reused = 0;")
kvtwin_faulty_sessions(believes_a_removal_that_was_refused
  "if (!cache_->Remove(choice.slot, reused, kOpenEnd).ok()) {"
  "if (!cache_->Remove(choice.slot, reused, kOpenEnd).ok() && reused == 0) {")
kvtwin_faulty_sessions(believes_a_shift_that_was_refused
  "if (cache_->Remove(slot, keep, end).ok() && CanResume(slot, Size(rest))) {"
  "(void)cache_->Remove(slot, keep, end);\n    if (CanResume(slot, Size(rest))) {")

file(CONFIGURE OUTPUT faulty_sessions/all.cc @ONLY CONTENT
"#include \"props/sessions/faulty_sessions.h\"
${faulty_sessions_included}
namespace kvtwin::props {
std::vector<FaultySessions> AllFaultySessions() {
  return {
${faulty_sessions_listed}  };
}
}  // namespace kvtwin::props
")
set(faulty_sessions_sources ${PROJECT_BINARY_DIR}/faulty_sessions/all.cc)
