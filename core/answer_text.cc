#include <algorithm>
#include <bit>
#include <utility>

#include "core/index.h"
#include "kvtwin/serving.h"

namespace kvtwin {
namespace {

// Returns the number of bytes at the end of a text that begin a character of
// UTF-8 and are not all of it.
std::size_t UnfinishedBytes(std::string_view text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size());
       ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    // The first byte of a character of n bytes begins with n ones, those after
    // it with a single one.
    const int ones = std::countl_one(byte);
    if (ones == 1) continue;
    // No character begins with the other bytes.
    const bool begins = byte >= 0xC2 && byte <= 0xF4;
    return begins && AsSize(ones) > back ? back : 0;
  }
  return 0;
}

}  // namespace

// The search of Knuth, Morris and Pratt, whose time is linear.
bool AnswerText::Stop::Add(char byte) {
  const auto extend = [this](std::size_t length, char next) {
    while (length > 0 && text[length] != next) length = borders[length - 1];
    return text[length] == next ? length + 1 : 0;
  };
  matched = extend(matched, byte);
  if (matched > borders.size()) {
    borders.push_back(matched == 1 ? 0 : extend(borders.back(), byte));
  }
  return matched == text.size();
}

AnswerText::AnswerText(std::vector<std::string> stops) {
  for (std::string& stop : stops) {
    if (!stop.empty()) stops_.push_back({std::move(stop)});
  }
}

std::string AnswerText::Add(std::string_view bytes) {
  if (ended_) return "";
  const std::size_t begin = held_.size();
  held_.insert(held_.end(), bytes.begin(), bytes.end());
  ends_.push_back(shown_ + held_.size());
  for (std::size_t i = begin; i < held_.size(); ++i) {
    std::size_t found = 0;
    for (Stop& stop : stops_) {
      if (stop.Add(held_[i])) found = std::max(found, stop.text.size());
    }
    if (found == 0) continue;
    const std::size_t end = i + 1 - found;
    removed_ = std::ranges::count_if(
        ends_, [&](std::size_t token) { return token > shown_ + end; });
    ended_ = true;
    return Take(end);
  }
  std::size_t matched = 0;
  for (const Stop& stop : stops_) matched = std::max(matched, stop.matched);
  const std::size_t end = held_.size() - matched;
  const std::string last(IteratorAt(held_, end - std::min<std::size_t>(3, end)),
                         IteratorAt(held_, end));
  return Take(end - UnfinishedBytes(last));
}

std::string AnswerText::End() {
  if (ended_) return "";
  ended_ = true;
  return Take(held_.size());
}

std::string AnswerText::Take(std::size_t count) {
  const auto end = IteratorAt(held_, count);
  std::string text(held_.begin(), end);
  held_.erase(held_.begin(), end);
  shown_ += count;
  while (!ends_.empty() && ends_.front() <= shown_) ends_.pop_front();
  return text;
}

}  // namespace kvtwin
